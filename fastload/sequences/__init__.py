"""Orders and datasets for training on sequences: mixtures, batches by tokens, packed rows and windows of tokens.

`Mixture` and `TokenBatchSampler` are samplers, `Packed` and `TokenWindows` are datasets. Each is a pure function of its
arguments, the epoch and the step. So every rank computes the same plan, and a loader resumes each exactly.
"""
