"""What other tools call methods and options, and what these are called here."""

# What other tools call an option, and what to write here. The values complete "... is called".
OTHER_OPTIONS = {
    "lambda": "scaling_factor",
    "lambda_": "scaling_factor",
    "scaling_coefficient": "scaling_factor",
    "scale": "scaling_factor",
    "weight": "weights",
    "threshold": "density",
    "reset_thresh": "density (a fraction: 20 is 0.2)",
    "topk": "density",
    "k": "density",
    "drop_rate": "density (the fraction that is kept)",
    "base_model": "base",
    "consensus_method": "majority_sign_method ('sum' is 'weighted_total', 'count' is 'frequency')",
    "merge_method": "method",
    "combination_type": "method",
    "alpha": "t (of slerp) or weights",
    "filter_wise": "scope='row'",
    "nuslerp_row_wise": "scope='row'",
    "row_wise": "scope='row'",
    "nuslerp_flatten": "scope='tensor'",
    "normalize_weights": "normalize",
    "rescale_norm": "rescale",
    "eps": "epsilon",
    "tol": "tolerance",
    "max_iter": "iterations",
    "out_dtype": "dtype",
    "random_seed": "seed",
}
# What other tools have and isthmus does not need.
NEEDLESS_OPTIONS = {
    "int8_mask": "isthmus keeps no masks in memory",
    "tokenizer_source": "isthmus merges tensors and leaves tokenizers alone",
    "lazy_unpickle": "isthmus maps safetensors files into memory",
}
OTHER_METHODS = {
    "dare_linear": "dare",
    "average": "linear",
    "mean": "linear",
    "weight_average": "linear",
    "model_soup": "linear",
    "wise_ft": "linear",
    "lerp": "linear",
    "sum": "task_arithmetic",
    "task_vectors": "task_arithmetic",
    "della_magprune": "della",
    "ramplus_tl": "ram_plus",
    "fisher_merging": "fisher",
    "magnitude": "magnitude_prune",
    "stock": "model_stock",
    "greedy_soup": "isthmus.greedy_soup(models, evaluate)",
}
