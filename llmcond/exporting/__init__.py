"""Export of fitted embedders as models of other libraries."""
