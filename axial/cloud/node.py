"""A node of the Cloud TPU API as users of cloud-tpu-client know it: health, waiting, version, end points.

TensorFlow has its own copy of that client and prefers the package where it is installed; so does this module. The
package pins google-api-python-client 1.8, which needs a protobuf too old for TensorFlow: `scripts/tpu/install.sh` says
how it is installed without that.
"""

from absl import flags

from axial.cloud.calls import credentials
from axial.errors import InputError


def make_client(name, project, zone, endpoint=""):
    """A `Client` of cloud-tpu-client.

    Args:
        name: of the node.
        project, zone: of Google Cloud.
        endpoint: address of a private end point; '' for Google's own.

    Raises:
        InputError: no credentials.
    """
    from googleapiclient import discovery

    try:
        from cloud_tpu_client.client import Client
    except ImportError:
        from tensorflow.python.tpu.client.client import Client

    if not flags.FLAGS.is_parsed():  # as in a notebook: the client reads flags of its own, with their defaults
        flags.FLAGS.mark_as_parsed()
    service = discovery.build(
        "tpu",
        "v1",
        credentials=credentials(endpoint),
        client_options={"api_endpoint": endpoint} if endpoint else None,
        cache_discovery=False,
        static_discovery=True,  # the description of the API that came with the package
    )
    return Client(tpu=name, zone=zone, project=project, service=service)


def describe(name, project, zone, **options):
    """Yields lines on a node.

    Args:
        name, project, zone: see `make_client`.
        **options: `endpoint`; `wait`, whether to wait until the node is healthy; `poll`, seconds between two looks.

    Raises:
        InputError: there is no such node, or its state is not known, or it does not become healthy within 20 minutes.
    """
    client = make_client(name, project, zone, options.get("endpoint", ""))
    try:
        if options.get("wait"):
            client.wait_for_healthy(timeout_s=1200, interval=options.get("poll", 30))
        state = client.state()
        yield f"node {name}: {state}, {client.health() or 'health unknown'}"
        yield f"  runs {client.accelerator_type()}, software {client.runtime_version()}"
        symptoms = client.symptoms() or []
        for symptom in symptoms:
            yield f"  symptom {symptom.get('createTime', '')} {symptom.get('symptomType', '')}"
        recoverable = client.recoverable()
        yield f"  recoverable: {'yes' if recoverable else 'no; delete it, then make it again'}"
        if state == "READY":
            ends = ",".join(f"grpc://{end['ipAddress']}:{end['port']}" for end in client.network_endpoints())
            yield f"  end points: --tpu={ends}"
    except (ValueError, RuntimeError) as error:  # the client's own, around whatever the service says
        raise InputError(f"--node={name}: {' '.join(str(error).split())[:300]}") from None
