"""Calls of the Cloud's APIs: tried again while the Cloud is at fault, printed by a dry run, and one line for a refusal.

Credentials are Google's application default. They are never printed. An end point that starts with http:// gets none.
"""

import json
import re
import time

from axial.errors import InputError
from axial.io import show

LOGIN = "gcloud auth application-default login"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


class Refused(InputError):
    """The Cloud refuses a call; the message says why."""


class Absent(Refused):
    """There is no such resource."""


class Taken(Refused):
    """There is such a resource already."""


class NoQuota(Refused):
    """The project may not have that many chips now."""


class Calls:
    """Makes API calls.

    Attributes:
        dry_run: print each call and make none.
        timeout: seconds that a call may take.
    """

    def __init__(self, *, dry_run=False, timeout=60.0, first_wait=2.0, tries=6, wait=time.sleep, say=show.say):
        """
        Args:
            dry_run, timeout: see the attributes.
            first_wait: seconds before the second try; each later wait is twice as long.
            tries: of a call that the Cloud, not its caller, makes fail.
            wait: function of seconds.
            say: function of a line.
        """
        self.dry_run, self.timeout = dry_run, timeout
        self._first_wait, self._tries, self._wait, self._say = first_wait, tries, wait, say

    def __call__(self, method, url, send, *, body=None):
        """The answer of a call, or None in a dry run.

        Args:
            method, url: for a dry run and for messages.
            send: function without arguments that makes the call.
            body: of the call, plain values; None for a call without one.

        Raises:
            Absent, Taken, NoQuota, Refused: the Cloud refuses the call, or its last try failed.
        """
        if self.dry_run:
            text = "" if body is None else json.dumps(body, indent=2, sort_keys=True)
            for line in (f"{method} {url}", *text.splitlines()):
                self._say(line)
            return None
        for tried in range(self._tries):
            try:
                return send()
            except Exception as error:  # the clients raise of four libraries
                refusal = _refusal(error, method, url)
                if isinstance(refusal, Taken) and method == "POST" and tried:
                    return None  # the try before was heard, its answer was lost
                if refusal:
                    raise refusal from None
                if tried + 1 == self._tries:
                    raise Refused(f"{method} {url}: {_reason(error)}; tried {self._tries} times") from None
                self._wait(self._first_wait * 2**tried)


def _refusal(error, method, url):
    """The exception that a call's error means, or None if another try may succeed. Raises what is no answer at all."""
    code = _status(error)
    if code is None:
        if _of_credentials(error):
            return Refused(f"no credentials that are valid now ({type(error).__name__}): {LOGIN}")
        if not _of_network(error):
            raise error
        return None
    said = f"{method} {url}: {_reason(error)}"
    if code in (403, 429) and method == "POST" and is_quota(said):
        return NoQuota(f"no quota: {said}")
    if code == 404:
        return Absent(said)
    if code == 409:
        return Taken(said)
    if code == 401:
        return Refused(f"the credentials were refused: {LOGIN} ({said})")
    if code in (408, 429) or code >= 500:
        return None
    return Refused(said)


def is_quota(text):
    """Whether a message is about how many chips a project may have, not about how often it may call."""
    return "quota" in text.lower() and not re.search(r"\brate\b|per minute|per second", text.lower())


def _status(error):
    """HTTP status of an error of google-api-core, kubernetes or requests, or None."""
    code = getattr(error, "code", None) or getattr(error, "status", None)
    if code is None:
        code = getattr(getattr(error, "response", None), "status_code", None)  # of requests
    try:
        return int(code) or None  # kubernetes has 0 where no answer came
    except (TypeError, ValueError):
        return None


def _reason(error):
    """What an error says, without the call's address that libraries put before it."""
    body = getattr(error, "body", None)  # of kubernetes: a Status
    try:
        return json.loads(body)["message"]
    except (TypeError, ValueError, KeyError):
        said = getattr(error, "message", None) or getattr(error, "reason", None) or str(error)
        return re.sub(r"^[A-Z]+ http\S+: ", "", " ".join(said.split()))[:400]


def _of_credentials(error):
    return type(error).__module__.startswith("google.auth") and type(error).__name__ != "TransportError"


def _of_network(error):
    """Whether no whole answer came: refused, closed, timed out."""
    module = type(error).__module__
    return (
        isinstance(error, (OSError, TimeoutError))
        or module.startswith(("requests", "urllib3", "http.client"))
        or type(error).__name__ in ("TransportError", "RetryError", "ApiException")
    )


def credentials(endpoint=""):
    """Credentials for an end point. Raises InputError if there are none."""
    import google.auth
    from google.auth import credentials as kinds
    from google.auth import exceptions

    if endpoint.startswith("http://"):
        return kinds.AnonymousCredentials()
    try:
        return google.auth.default(scopes=SCOPES)[0]
    except exceptions.GoogleAuthError as error:
        raise InputError(f"no credentials: {LOGIN} ({str(error).splitlines()[0]})") from None


def needs(backend, package, error):
    """InputError for a client library that is not installed."""
    return InputError(f"--backend={backend} needs {package}: pip install 'axial[tpu]' ({error})")
