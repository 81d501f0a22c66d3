"""The benchmarks: fastload against torch's DataLoader on the same machine, in the same run. See README.md."""
