"""Ask a server for a completion, and come back when it says so: 429 and 503 carry Retry-After in seconds.

python examples/patient_client.py http://127.0.0.1:8000 "Once upon a time"
"""

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

TRIES = 5
LONGEST_WAIT_S = 60.0
"""A server that is busy for longer is given up."""


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the answer to a POST. Wait as long as Retry-After asks, and try again, up to TRIES times.

    Raises urllib.error.HTTPError for other errors, for longer waits, and after the last try.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            wait_s = float(error.headers.get("Retry-After") or "inf")
            if error.code not in (429, 503) or wait_s > LONGEST_WAIT_S or not left:
                raise
            print(f"busy: trying again in {wait_s:g} s", file=sys.stderr)
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def main() -> None:
    """Print the completion of the command line's prompt."""
    if len(sys.argv) != 3:
        raise SystemExit("Give the server's address and a prompt: http://127.0.0.1:8000 'Once upon a time'")
    url, prompt = sys.argv[1:]
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as models:
            model = json.load(models)["data"][0]["id"]
        answer = post(f"{url}/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 32})
    except (OSError, ValueError) as error:  # no server, a refusal, or no address
        raise SystemExit(f"{url} gave no completion: {error}") from None
    print(answer["choices"][0]["text"])


if __name__ == "__main__":
    main()
