"""How the shipped model was made: a small Wan image-to-video pipeline, trained on moving digits.

``python -m stages.training --help`` lists the steps. They need the extra ``diffusion`` and
scikit-learn, whose bundled 8x8 digits are the data; nothing is downloaded. Half an hour on one core is
enough for a usable model, an hour for the shipped one.
"""
