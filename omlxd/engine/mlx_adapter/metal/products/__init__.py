"""Products of few rows with quantised weights, on Metal.

Rule: `product.py` has the kernels, `install.py` puts them into MLX's layers where rule.py lets them.
"""
