"""The benchmark: what is measured, the engines that are driven through it, and what came of it.

Times are taken in interleaved repetitions of one run, since machines drift; ratios are formed repetition by repetition.
Knows neither terminals nor options of a command line: those are `cli/bench.py` and `cli/bench_table.py`.
"""
