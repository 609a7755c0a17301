"""Whole models: `scale_model`, `simulate_format`, delayed scaling, `rebalance` and the guard."""
