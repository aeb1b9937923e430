"""Position-sensitive attention: one equation, and the forms that compute it fast.

Start with `layer.py`: the equation, its options, its weights and norms, and the plain path.

    layer.py       the layers that train; `choose` of `../device.py` says where each form runs
    windows.py     which keys a query sees; windows that keep memory linear in the length
    folded.py      the layer that serves: no batch norm is left
    cpu.py         the form for CPUs: plain batched products, made in parts that stay in the cache
    xla.py         the form for GPUs and TPUs: einsums that XLA lays out
    tpu/           Pallas kernels for a TPU: a whole layer, no map of logits in main memory
    NOTES.md       measurements, and what was tried and dropped

Which form runs (`backend='auto'`; see `choose`):

    device   training                                      inference
    CPU      cpu                                           cpu
    GPU      xla                                           xla
    TPU      xla; with backend='kernel' the kernels wherever they can serve

All forms agree with the float64 loops of `tests/oracles.py`.
"""
