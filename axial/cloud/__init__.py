"""A TPU slice from a laptop: made, trained on, made again after a preemption, deleted.

`slices.py` is the table of slices and of the software that they boot. `backend.py` is what the three back ends share:
`queued_resources.py` (Cloud TPU API), `compute_engine.py` (a managed instance group) and `gke.py` (a JobSet).
`calls.py` makes API calls, or prints them. `workers.py` says what runs on a worker, `server.py` is one of it.
`run.py` is the loop, `estimate.py` says what a run costs, `bucket.py` where its bucket is.

No module of this folder imports TensorFlow or a client library until it is used.
"""
