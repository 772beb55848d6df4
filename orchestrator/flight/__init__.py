"""The flight recorder: the last events of each generation, so that what went wrong can be run again."""
