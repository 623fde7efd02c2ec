"""The simulated set against a real one: the same workflows, profile and arrivals, side by side."""
