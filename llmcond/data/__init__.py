"""Reading of datasets: files become validated rows in splits, with ratings on a known scale."""
