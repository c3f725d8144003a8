"""Which layout of TP x PP x DP x ZeRO x CO2 a model should take on a cluster, and why: python -m training.plan --help.

Each formula is a function; the first line of its docstring is the formula with its source:

[N] Narayanan et al., SC'21, arXiv 2104.04473 (Megatron-LM)
[K] Korthikanti et al., 2022, arXiv 2205.05198, as Megatron-LM's theoretical_memory_usage.py computes it
[R] Rajbhandari et al., 2020, arXiv 1910.02054 (ZeRO)
[F] Dao, 2023, arXiv 2307.08691 (FlashAttention-2)
[P] Patarasuk and Yuan, JPDC 2009 (ring)   [T] Sanders et al., Parallel Computing 2009 (two trees)
[C] Sun et al., arXiv 2401.16265 (CO2)   [M] as training/checks.py counts, or measured by a test   [O] our own

Symbols: l layers, h width, a heads, f inner width, V vocabulary, s context; t tensor, p pipeline, d data parallel ranks
of an island, I islands, among which CO2 works (1: synchronous); v chunks of a stage, b samples of a micro-batch, m
micro-batches of a step, z ZeRO's stage; g devices of a node.
"""
