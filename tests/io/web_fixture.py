"""A local web server that stands in for Google's servers."""

import contextlib
import http.server
import threading


@contextlib.contextmanager
def answering(answers, missing=""):
    """Starts a server and yields its host:port.

    Args:
        answers: dict from paths to texts, or to functions that return a text.
        missing: text of the 404 response for other paths.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = answers.get(self.path.partition("?")[0])
            text = text() if callable(text) else text
            self.send_response(404 if text is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write((missing if text is None else text).encode())

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
