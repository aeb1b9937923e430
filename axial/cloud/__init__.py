"""Runs a training on a TPU slice, with an engine that lives in the cloud.

`runs.py` describes a run. `supervisor.py` is the main process of each host, with `server.py` and `lease.py`, which lets
one run train in a folder. `engines.py` has the engines: GKE (a JobSet), SkyPilot (a managed job) and gcloud (by hand).
`bucket.py` finds the region of a bucket, `node.py` describes a node of the Cloud TPU API. Nothing here imports
TensorFlow.
"""
