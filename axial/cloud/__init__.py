"""Runs a training on a TPU slice, with an engine that lives in the cloud.

`runs.py` describes a run. `supervisor.py` is the main process of each host. `server.py` is TensorFlow's server.
`lease.py` lets only one run train in a folder. `engines.py` has the engines: GKE (a JobSet), SkyPilot (a managed job)
and gcloud (by hand). `bucket.py` finds the region of a bucket. `node.py` describes a node of the Cloud TPU API. No
module here imports TensorFlow at its top.
"""
