"""Describes a node of the Cloud TPU API through cloud-tpu-client: health, software version, end points.

TensorFlow has its own copy of that client. TensorFlow and this module prefer the installed package to that copy.
`scripts/tpu/install.sh` installs the package without its pinned dependencies: they need a protobuf too old for
TensorFlow.
"""

from absl import flags

from axial.errors import InputError
from axial.io.read import first_line

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


def make_client(name, project, zone, endpoint=""):
    """A `Client` of cloud-tpu-client. Raises InputError without credentials; an http:// `endpoint` needs none."""
    import google.auth
    from google.auth import credentials, exceptions
    from googleapiclient import discovery

    try:
        from cloud_tpu_client.client import Client
    except ImportError:
        from tensorflow.python.tpu.client.client import Client

    if not flags.FLAGS.is_parsed():  # as in a notebook; the client then reads the defaults of its own flags
        flags.FLAGS.mark_as_parsed()
    try:
        anonymous = endpoint.startswith("http://")
        auth = credentials.AnonymousCredentials() if anonymous else google.auth.default(scopes=SCOPES)[0]
    except exceptions.GoogleAuthError as error:
        raise InputError(f"no credentials: gcloud auth application-default login ({first_line(error)})") from None
    options = {"client_options": {"api_endpoint": endpoint}} if endpoint else {}
    # static_discovery takes the description of the API from the package, not from the network
    service = discovery.build("tpu", "v1", credentials=auth, cache_discovery=False, static_discovery=True, **options)
    return Client(tpu=name, zone=zone, project=project, service=service)


def describe(name, project, zone, *, endpoint="", wait=False, poll=30):
    """Yields lines that describe a node. With `wait`, it first checks every `poll` seconds until the node is healthy.

    Raises:
        InputError: there is no such node, its state is unknown, or it does not become healthy within 20 minutes.
    """
    client = make_client(name, project, zone, endpoint)
    try:
        if wait:
            client.wait_for_healthy(timeout_s=1200, interval=poll)
        state = client.state()
        yield f"node {name}: {state}, {client.health() or 'health unknown'}"
        yield f"  runs {client.accelerator_type()}, software {client.runtime_version()}"
        for symptom in client.symptoms() or []:
            yield f"  symptom {symptom.get('createTime', '')} {symptom.get('symptomType', '')}"
        yield f"  recoverable: {'yes' if client.recoverable() else 'no; delete it, then make it again'}"
        if state == "READY":
            ends = ",".join(f"grpc://{end['ipAddress']}:{end['port']}" for end in client.network_endpoints())
            yield f"  end points: --tpu={ends}"
    except (ValueError, RuntimeError) as error:  # the client puts the service's message into these errors
        raise InputError(f"--node={name}: {' '.join(str(error).split())[:300]}") from None
