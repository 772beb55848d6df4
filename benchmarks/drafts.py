"""The drafts that measurements use, where no trained one is at hand."""

LAYER_SUBSET = (0, 1, 2, 8, 9, 10, 11, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 28, 29)
"""Layers of the default model that make a draft: 20 of 30, the others taken away one by one, each time the one that
cost least acceptance on five of the prompts (.61 greedy, .49 at temperature 1). Not a fast draft: one that is right
often enough, and wrong often enough, to try everything. Fewer layers are soon worthless: .24 with 14, .03 with 10."""
CLOSE_SUBSET = (0, 1, 2, 3, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 28, 29)
"""25 of 30, found in the same way: closer to the target (.76 greedy, .68 at temperature 1), where speed is no matter.
Mistakes show sooner with it: runs are long, and replacements rare enough to differ from the target's law."""
CAUSAL_LM = "causal_lm"
PROMPT_LOOKUP = "prompt_lookup"
FEATURE = "feature"
"""The trained draft that ships for the default model."""
LOOKUP_THEN_FEATURE = f"{PROMPT_LOOKUP},{FEATURE}"
"""What `--draft auto` drafts with: lookup where it has a match, the trained draft elsewhere."""
