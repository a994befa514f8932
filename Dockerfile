# Two images: `rank` holds only what a rank needs, `judge` holds everything.
#
#   docker build --target rank  -t shardproof-rank  .
#   docker build --target judge -t shardproof-judge .
#
# Needs no BuildKit.  For a closed network, put wheels into wheels/ and extra CA certificates (*.crt)
# into certificates/; both folders are optional, and images contain neither.  deploy/base-image.sh
# builds a base image if none can be pulled: --build-arg BASE_IMAGE=shardproof-base.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm

# ---- common base: an unprivileged user, and a folder for results
FROM ${BASE_IMAGE} AS base
RUN useradd --uid 10001 --create-home --shell /bin/sh shardproof \
 && install -d -o shardproof -g shardproof /results /opt/shardproof
# UTF-8 for file names; one thread per rank, because ranks outnumber cores.
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 LANG=C.UTF-8 OMP_NUM_THREADS=1 \
    PYTHONPATH=/opt/shardproof
WORKDIR /opt/shardproof

# ---- the packages of a rank
FROM base AS packages
# pip reads these from its environment: a mirror, or 1 for a network without an index.
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG TORCH=torch==2.13.0
# Index of CPU-only builds; unused if wheels/ holds a torch.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_FIND_LINKS=/context
# COPY accepts globs without a match as long as one source exists.
COPY constraints.txt wheel[s] certificate[s] /context/
RUN if ls /context/*.crt >/dev/null 2>&1; then \
        cp /context/*.crt /usr/local/share/ca-certificates/ && update-ca-certificates >/dev/null; \
    fi
RUN if [ -e /etc/ssl/certs/ca-certificates.crt ]; then \
        printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' > /etc/pip.conf; \
    fi
RUN python3 -m venv /opt/venv \
 && if ! ls /context/torch-*.whl >/dev/null 2>&1 && [ -z "$PIP_NO_INDEX" ]; then \
        export PIP_EXTRA_INDEX_URL="$TORCH_INDEX"; \
    fi \
 && pip install --quiet -c /context/constraints.txt "$TORCH" numpy pydantic PyYAML psutil \
 && cd /opt/venv/lib/python3*/site-packages/torch \
 && find bin -type f ! -name torch_shm_manager -delete \
 && rm -rf test include

# ---- the digits images, extracted from scikit-learn, which a rank then does not need
FROM packages AS digits
RUN pip install --quiet --no-deps -c /context/constraints.txt scikit-learn
COPY suite/workloads/data.py /tmp/
RUN cd /tmp && python -c "import data, pathlib; data.write_digits(pathlib.Path('/digits.npz'))"

FROM base AS runtime
COPY --from=packages /opt/venv /opt/venv
COPY --from=digits /digits.npz /opt/venv/share/shardproof/digits.npz

# ---- rank: torch, numpy, pydantic, PyYAML, psutil and the suite
FROM runtime AS rank
LABEL shardproof=rank
COPY suite shardproof
COPY impls impls
COPY scenarios scenarios
COPY deploy deploy
# An unprivileged user cannot store byte code, so every rank would compile it again.
RUN python -m compileall -q shardproof impls
USER shardproof
CMD ["python", "-m", "shardproof.multinode.torchrun", "--help"]

# ---- further packages of the judge: the files that their installation adds
FROM packages AS extras
COPY pyproject.toml /context/
RUN touch /before && sleep 1 \
 && python -c "import tomllib; print(*tomllib.load(open('/context/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /wanted \
 && pip install --quiet -c /context/constraints.txt -r /wanted \
 && mkdir /extras && cd /opt/venv \
 && find . ! -type d -cnewer /before -print0 | tar -c --null -T - | tar -x -C /extras

# ---- judge: everything
FROM runtime AS judge
LABEL shardproof=judge
COPY --from=extras /extras /opt/venv
COPY suite shardproof
COPY impls impls
COPY scenarios scenarios
COPY deploy deploy
# An unprivileged user cannot store byte code, so every rank would compile it again.
RUN python -m compileall -q shardproof impls
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN printf '#!/bin/sh\nexec python -m shardproof "$@"\n' > /usr/local/bin/shardproof \
 && chmod 755 /usr/local/bin/shardproof
USER shardproof
CMD ["shardproof", "--help"]
