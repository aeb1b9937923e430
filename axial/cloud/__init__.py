"""A training on a TPU slice, by an engine that lives in the cloud.

`runs.py` describes a run, `supervisor.py` is the main process of each host, with `server.py`. `engine.py` is what the
engines share, which are a file each: `gke.py` (a JobSet), `skypilot.py` (a managed job), `gcloud.py` (by hand).
`bucket.py` says where a bucket is, `node.py` tells of a node of the Cloud TPU API. Nothing here imports TensorFlow.
"""
