"""Many adapters on one frozen base: a store of adapters, an engine with an adapter per request, and an HTTP server."""

from importlib.util import find_spec

from ..errors import ForewordError


def require_extra() -> None:
    """Raise `ForewordError` where a package of the HTTP server is missing. The store and the engine need none."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ForewordError(f"the server needs {missing[0]}: pip install 'foreword[serve]'")
