"""A training on a TPU slice, by an engine that lives in the cloud.

`runs.py` describes a run, `supervisor.py` is the main process of each host, with `server.py` and `lease.py`, which lets
one run train in a folder. `engines.py` has the engines: GKE (a JobSet), SkyPilot (a managed job), gcloud (by hand).
`bucket.py` says where a bucket is, `node.py` tells of a node of the Cloud TPU API. Nothing here imports TensorFlow.
"""
