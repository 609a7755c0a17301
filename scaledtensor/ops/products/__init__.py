"""Matrix products: the table of their spellings, and the casts of their operands."""
