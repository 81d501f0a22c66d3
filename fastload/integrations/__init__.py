"""fastload inside frameworks that need more than a loader. Each file imports its framework.

lightning      Lightning's Trainer
transformers   Hugging Face's Trainer
"""
