"""Names of other libraries over fastload: programs that were written for them run with their imports changed.

twister2flow       Twister2Flow's pipelines; twister2graph: its module `PipelineGraph`
twister2           Twister2's environment, sources and TSets
twister2deepnet    Twister2:DeepNet: MNIST, its hand-over in Parquet files, mini-batches, all_reduce
alcf               the loader of ALCF's ImageNet example
ranks              which rank a program of Twister2's is, and its process group
"""
