from hypothesis import settings

# A deadline for each example would be a maximal wall time, which a busy machine breaks.
settings.register_profile("ring", deadline=None)
settings.load_profile("ring")
