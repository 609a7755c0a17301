"""Whole models: `scale_model`, simulation, delayed scaling, rebalancing and the guard."""
