"""Random numbers that belong to the sample, whatever draws them."""
