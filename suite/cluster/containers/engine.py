"""The container engine of this machine: how it is reached, and the images that nodes are made of.

By the docker SDK for Python (extra ``cluster``).  What images are made of: ``image_inputs.py``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardproof.cluster.containers import image_inputs
from shardproof.cluster.containers.image_inputs import LEAN, ROOT
from shardproof.runs.machine import commit

OWN_BASE = "shardproof-base"
#: The label of what an image was made of.
SOURCE = "shardproof.source"
#: The label of its parts, and of the checkout (``image_inputs.label_of_inputs``).
INPUTS = "shardproof.inputs"
_TAIL = 20
#: Seconds without a word of a command after which its container is looked at.
_SILENT_SECONDS = 5.0


class NoCluster(RuntimeError):
    """Containers cannot be had here; the message says why and what to do."""


def failures() -> tuple[type[Exception], ...]:
    """The errors of the SDK where the engine cannot do something, stalls, or has gone."""
    from docker.errors import DockerException
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    return DockerException, RequestException, HTTPError


def client() -> Any:
    """A client of the engine.

    :raises NoCluster: there is none, or no package to talk to it.
    """
    try:
        import docker
    except ImportError:
        raise NoCluster(
            "the package docker is missing: `pip install shardproof[cluster]`"
        ) from None
    try:
        found = docker.from_env(timeout=120)
        found.ping()
    except failures() as error:
        what = (
            "no container engine answers: install docker, start its daemon, give this user access"
        )
        raise NoCluster(f"{what} ({error})") from None
    return found


def engine_missing() -> str | None:
    """Why no container can be started here (``None``: one can)."""
    try:
        client().close()
    except NoCluster as error:
        return str(error)
    return None


class Output:
    """The output of a command in the container ``box``, given to ``take`` by a thread as it comes.

    ``start`` starts the command.
    """

    def __init__(
        self,
        engine: Any,
        box: Any,
        start: Callable[[], Iterable[bytes]],
        take: Callable[[bytes], object],
    ) -> None:
        self._engine, self._box, self._start, self._take = engine, box, start, take
        self._heard = time.monotonic()
        # Not the thread's join: one that is interrupted takes the thread for ended.
        self.ended = threading.Event()
        #: What broke it, at most one.
        self.broke: list[Exception] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def wait(self) -> None:
        """Return once it has ended, or broke.

        :raises NoCluster: it says nothing, since its container is paused or has ended.
        """
        while not self.ended.wait(0.2) and not self.broke:
            if time.monotonic() > self._heard + _SILENT_SECONDS:
                self._require_going_on()
                self._heard = time.monotonic()

    def _require_going_on(self) -> None:
        state, name = self._engine.api.inspect_container(self._box.id)["State"], self._box.name
        if state["Paused"]:
            raise NoCluster(f"another program paused container {name}: run the command again")
        if not state["Running"] and not self.ended.wait(_SILENT_SECONDS):
            raise NoCluster(f"container {name} has ended: run the command again")

    def _follow(self) -> None:
        try:
            for part in self._start():
                self._heard = time.monotonic()
                # What nobody reads (`| head`) is thrown away: a head whose output is full waits.
                if not self.broke:
                    self._pass_on(part)
        except Exception as error:  # noqa: BLE001 - told by the thread that waits
            self.broke.append(error)
        finally:
            self.ended.set()

    def _pass_on(self, part: bytes) -> None:
        try:
            self._take(part)
        except OSError as error:
            self.broke.append(error)


def said(engine: Any, box: Any, asked: str) -> Callable[[], str]:
    """Start the command ``asked`` in ``box``; what waits for its end, and returns all that it said.

    :raises NoCluster: by what waits: ``box`` is paused or has ended.
    """
    parts: list[bytes] = []
    start = functools.partial(engine.api.exec_start, asked, stream=True)
    output = Output(engine, box, start, parts.append)

    def answer() -> str:
        output.wait()
        if output.broke:
            raise output.broke[0]
        return b"".join(parts).decode("utf-8", "replace")

    return answer


def image_name(target: str) -> str:
    """The image of a target of the Dockerfile."""
    return image_inputs.image_name(target, os.environ)


def build(engine: Any, force: bool = False, targets: Sequence[str] = LEAN) -> dict[str, Any]:
    """Build the images that are missing or old; their entry in ``run.json``.

    ``targets``: what nodes are made of, and the head; their ids stand under ``rank`` and ``judge``.

    :raises NoCluster: a build failed, or this is no checkout and there are no images.
    """
    names = [image_name(target) for target in targets]
    facts, arguments, inputs = _wanted(engine)
    labels = {SOURCE: facts["source"], INPUTS: image_inputs.label_of_inputs(inputs)}
    for role, target, name in zip(LEAN, targets, names, strict=True):
        image, why = _found(engine, name), "--force" if force else ""
        if image is None:
            why = "missing"
        elif image.labels.get(SOURCE) != facts["source"]:
            why = image_inputs.why_old(image.labels.get(INPUTS, ""), inputs)
        if why:
            print(f"building {name} on {facts['base']} ({why}) ...", flush=True)
            _build(engine, target, arguments, labels)
            if image is not None:
                _remove_unused(engine, image.id)
        facts[role] = engine.images.get(name).id
    return facts | {"targets": list(targets)}


def torch_of_images() -> str:
    """Which torch images are built with now."""
    return image_inputs.arguments(os.environ)["TORCH"]


def is_old(engine: Any, image: str) -> bool:
    """Whether ``image`` is not there, or was made of other files or arguments than now.

    :raises NoCluster: as :func:`build`.
    """
    found = _found(engine, image)
    return found is None or found.labels.get(SOURCE) != _wanted(engine)[0]["source"]


def _wanted(engine: Any) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The facts about images, the arguments of their build, and digests of their inputs."""
    if not (ROOT / "Dockerfile").exists():
        raise NoCluster(f"{ROOT} has no Dockerfile: build images from a git clone of Shardproof")
    arguments = image_inputs.arguments(os.environ)
    base = _base_image(engine)
    found = _found(engine, base)
    base_id = base if found is None else found.id
    inputs = image_inputs.input_digests(arguments | {"BASE_IMAGE": base_id})
    told = image_inputs.told(arguments, image_inputs.source_digest(inputs))
    return {"base": base, "base_id": base_id} | told, arguments | {"BASE_IMAGE": base}, inputs


def _build(engine: Any, target: str, arguments: dict[str, str], labels: Mapping[str, str]) -> None:
    from docker.errors import DockerException

    said: list[str] = []
    step = ""
    try:
        for line in engine.api.build(
            path=str(ROOT),
            target=target,
            tag=image_name(target),
            buildargs=arguments | {"SOURCE": labels[SOURCE], "COMMIT": commit() or ""},
            labels=dict(labels),
            rm=True,
            forcerm=True,
            decode=True,
            timeout=3600,
        ):
            said.append(str(line.get("stream") or line.get("error") or "").rstrip())
            step = _told(step, said[-1])
            if "error" in line:
                text = "\n".join(filter(None, said[-_TAIL:]))
                raise NoCluster(f"building {image_name(target)} failed:\n{text}")
    except DockerException as error:
        raise NoCluster(f"building {image_name(target)} failed: {error}") from None


def _told(step: str, line: str) -> str:
    """Print ``step`` of a build, unless its next line says that it costs nothing; what is still to
    be printed after that line.
    """
    if not line or line.startswith("Step "):
        return line.partition("\n")[0] or step
    if step and " : FROM " not in step and "Using cache" not in line:
        print(f"  {step:.90}", flush=True)
    return ""


def _remove_unused(engine: Any, image: str) -> None:
    """Remove one that a build has replaced, unless it has other names or is made use of."""
    from docker.errors import DockerException

    with contextlib.suppress(DockerException):
        found = engine.images.get(image)
        if not found.tags and SOURCE in found.labels:
            engine.images.remove(image)


def _found(engine: Any, name: str) -> Any:
    """The image of that name; ``None``: there is none."""
    from docker.errors import ImageNotFound

    with contextlib.suppress(ImageNotFound):
        return engine.images.get(name)
    return None


def _base_image(engine: Any) -> str:
    """The image to build on: ``$BASE_IMAGE``, that of the Dockerfile or ours where one is here, or
    else the former pulled, or ours made.

    :raises NoCluster: none of it works; says what to install.
    """
    from docker.errors import DockerException

    wanted = image_inputs.default_argument("BASE_IMAGE")
    if given := image_inputs.given_base(os.environ):
        return given
    for name in (wanted, OWN_BASE):
        if _found(engine, name) is not None:
            return name
    with contextlib.suppress(DockerException):
        engine.images.pull(wanted)
        return wanted
    if shutil.which("debootstrap") and os.geteuid() == 0:
        print(f"{wanted} cannot be pulled: making {OWN_BASE} by debootstrap ...", flush=True)
        made = subprocess.run([ROOT / "deploy" / "base-image.sh", OWN_BASE], check=False)
        if made.returncode == 0:
            return OWN_BASE
    raise NoCluster(
        f"the base image {wanted} cannot be pulled: set BASE_IMAGE to an image with Python 3.11 "
        "and its venv module; or, as root, run `apt-get install debootstrap` and this command again"
    )
