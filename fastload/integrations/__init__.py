"""fastload inside frameworks that need more than a loader. Each file imports its framework.

lightning      Lightning's Trainer
accelerate     Hugging Face's Accelerator
transformers   Hugging Face's Trainer
prepared       a loader under Accelerate: the rank's batches, on the device, and their state
division       which samples are the rank's
stream         the rank's part of an iterable dataset
"""
