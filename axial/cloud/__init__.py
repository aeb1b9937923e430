"""Runs a training on a TPU slice, through an engine: a cloud service that makes the slice and starts the hosts.

`runs.py` describes a run. `supervisor.py` is the main process of each host. `server.py` runs TensorFlow's server.
`lease.py` lets only one run train in a folder. `engines.py` has the engines: GKE (a JobSet), SkyPilot (a managed job)
and gcloud (a queued resource). `bucket.py` finds the region of a bucket. `node.py` describes a node of the Cloud TPU
API. No module here imports TensorFlow at its top.
"""
