"""fastload inside the frameworks that people train with.

accelerate     what `accelerator.prepare(loader)` makes of a fastload loader
transformers   a mixin for Hugging Face's Trainer

Each imports its framework, so nothing here is imported before it is asked for.
"""
