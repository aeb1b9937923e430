"""Position-sensitive attention: one equation, and the implementations that compute it fast.

Start with `layer.py`.

    layer.py       equation, options, the layers that train, and the reference implementation
    windows.py     which keys a query sees; windows that keep memory linear in the length
    folded.py      the layer of exported models, with every batch norm folded into its weights
    cpu.py         for CPUs: batched matrix products, computed in chunks that stay in the cache
    xla.py         for GPUs and TPUs: einsums, whose layouts XLA chooses
    tpu/           Pallas kernels for TPUs, which compute a whole layer and store no map of logits in main memory
    NOTES.md       measurements, and alternatives that were slower

The implementation that runs with `backend='auto'` (see `choose` in `../device.py`):

    device   training                                      inference
    CPU      cpu                                           cpu
    GPU      xla                                           xla
    TPU      xla. With backend='kernel', the Pallas kernels compute every layer that they support.

All implementations agree with the float64 loops of `tests/oracles.py`.
"""
