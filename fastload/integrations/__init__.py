"""fastload inside frameworks that have no hook for a loader. Each file imports its framework.

transformers   Hugging Face's Trainer
"""
