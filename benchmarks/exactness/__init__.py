"""Exactness on the real model: identical text where the promise is identical text, the same law where it is a law.

`python -m benchmarks.exactness` runs four parts and prints their counts:

* `float32`: greedy text through the whole cluster against `transformers`' own `generate`;
* `greedy`, `coupled`: bfloat16 text through the whole cluster against the twin, which is the same request without
  speculation, over a spread of gamma, window, neighbours and drafters;
* `law`: chi-square tests of rejection mode (token and block rule), each beside planted mistakes it has to reject.
"""
