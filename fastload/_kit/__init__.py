"""Functions that all folders may use. They know nothing of loading."""
