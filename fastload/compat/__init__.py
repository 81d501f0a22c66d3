"""Names of other libraries over fastload: programs that were written for them run with their imports changed.

twister2flow    Twister2Flow's pipelines
alcf            the loader of ALCF's ImageNet example
"""
