"""A training on a TPU slice, by an engine that lives in the cloud.

`slices.py` is the table of slices and of the software that they boot. `runs.py` describes a run, `supervisor.py` is
the main process of each host, with `lease.py` and `server.py`. `engine.py` is what the engines share, which are a file
each: `gke.py` (a JobSet), `skypilot.py` (a managed job), `gcloud.py` (by hand). `cost.py` says what a run costs,
`bucket.py` where its bucket is, `node.py` tells of a node of the Cloud TPU API.

No module of this folder imports TensorFlow or a client library until it is used.
"""
