"""Plans the layout of a model on a cluster: TP x PP x DP x ZeRO x CO2. See python -m training.plan --help.

Each formula is a function. The first line of its docstring is the formula with its source:

- [N] Narayanan et al., SC'21, arXiv 2104.04473 (Megatron-LM)
- [K] Korthikanti et al., 2022, arXiv 2205.05198, as Megatron-LM's theoretical_memory_usage.py computes it
- [R] Rajbhandari et al., 2020, arXiv 1910.02054 (ZeRO)
- [F] Dao, 2023, arXiv 2307.08691 (FlashAttention-2)
- [P] Patarasuk and Yuan, JPDC 2009 (ring)
- [T] Sanders et al., Parallel Computing 2009 (two trees)
- [C] Sun et al., arXiv 2401.16265 (CO2)
- [M] as in training/checks.py, or measured by a test
- [O] our own

Symbols:

- Model: l layers, h width, a heads, f inner width, V vocabulary, s context.
- Ranks of an island: t tensor, p pipeline, d data parallel.
- I islands, with CO2 between them. One island is synchronous.
- Step: v chunks of a stage, b samples of a micro-batch, m micro-batches, z ZeRO's stage.
- g devices of a node, n ranks of a group, S bytes, B bytes/s, A seconds of a hop.
"""
