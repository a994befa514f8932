# What runs in containers, as targets:
#
#   rank        what a rank needs: torch, numpy, pydantic, PyYAML, psutil and the suite
#   judge       everything that judging needs
#   rank-all    rank with DeepSpeed, mpi4py and Open MPI; judge-all likewise
#
#   docker build --target rank -t shardproof-rank .          (`shardproof cluster build` builds them)
#
# Needs no BuildKit.  Packages are locked with hashes (deploy/locks, written by `make lock`).  For a
# closed network, put wheels into wheels/ and extra CA certificates (*.crt) into certificates/; both
# folders are optional, and images contain neither.  deploy/base-image.sh builds a base image if none
# can be pulled: --build-arg BASE_IMAGE=shardproof-base.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

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
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_FIND_LINKS=/context
# COPY accepts globs without a match as long as one source exists.
COPY constraints.txt deploy/locks/*.txt wheel[s] certificate[s] /context/
RUN if ls /context/*.crt >/dev/null 2>&1; then \
        cp /context/*.crt /usr/local/share/ca-certificates/ && update-ca-certificates >/dev/null; \
    fi
RUN if [ -e /etc/ssl/certs/ca-certificates.crt ]; then \
        printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' > /etc/pip.conf; \
    fi
RUN python3 -m venv /opt/venv \
 && pip install --quiet --no-deps --require-hashes -r /context/rank.txt
# The locked build of this torch; another than it comes as its index has it.
ARG TORCH=torch==2.13.0
# Index of CPU-only builds; unused if wheels/ holds a torch.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN if ! ls /context/torch-*.whl >/dev/null 2>&1 && [ -z "$PIP_NO_INDEX" ]; then \
        export PIP_EXTRA_INDEX_URL="$TORCH_INDEX"; \
    fi \
 && if grep -q "^$TORCH+cpu " /context/torch.txt; then \
        pip install --quiet --no-deps --require-hashes -r /context/torch.txt; \
    else \
        pip install --quiet -c /context/constraints.txt "$TORCH"; \
    fi \
 && cd /opt/venv/lib/python3*/site-packages/torch \
 && find bin -type f ! -name torch_shm_manager -delete \
 && rm -rf test include

# ---- further packages of the judge: the files that their installation adds
FROM packages AS judge-packages
RUN touch /before && sleep 1 \
 && pip install --quiet --no-deps --require-hashes -r /context/judge.txt \
 && mkdir /added && cd /opt/venv \
 && find . ! -type d -cnewer /before -print0 | tar -c --null -T - | tar -x -C /added

# ---- the digits images, extracted from scikit-learn, which a rank then does not need
FROM judge-packages AS digits
COPY suite/workloads/data.py /tmp/
RUN cd /tmp && python -c "import data, pathlib; data.write_digits(pathlib.Path('/digits.npz'))"

# ---- the suite
FROM base AS suite
COPY suite shardproof
COPY impls impls
COPY scenarios scenarios
COPY deploy deploy
COPY tools tools
# What the image tells of itself (suite/runs/machine.py); `shardproof cluster build` knows both.
ARG COMMIT=
ARG SOURCE=
RUN printf '{"commit": "%s", "source": "%s"}\n' "$COMMIT" "$SOURCE" > image.json
# An unprivileged user cannot store byte code, so every rank would compile it again.
RUN python3 -m compileall -q shardproof impls

FROM base AS runtime
COPY --from=packages /opt/venv /opt/venv
COPY --from=digits /digits.npz /opt/venv/share/shardproof/digits.npz

FROM runtime AS rank
LABEL shardproof.image=rank
COPY --from=suite /opt/shardproof ./
USER shardproof
CMD ["python", "-m", "shardproof.cluster.torchrun", "--help"]

FROM runtime AS judge-runtime
COPY --from=judge-packages /added /opt/venv
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN printf '#!/bin/sh\nexec python -m shardproof "$@"\n' > /usr/local/bin/shardproof \
 && chmod 755 /usr/local/bin/shardproof

FROM judge-runtime AS judge
LABEL shardproof.image=judge
COPY --from=suite /opt/shardproof ./
USER shardproof
CMD ["shardproof", "--help"]

# ---- DeepSpeed, built without compiled operators, mpi4py and Open MPI
FROM packages AS all-packages
RUN touch /before && sleep 1 \
 && DS_BUILD_OPS=0 pip install --quiet --no-deps --no-build-isolation --require-hashes -r /context/all.txt \
 && mkdir /added && cd /opt/venv \
 && find . ! -type d -cnewer /before -print0 | tar -c --null -T - | tar -x -C /added

FROM runtime AS rank-all
LABEL shardproof.image=rank-all
COPY --from=all-packages /added /opt/venv
COPY --from=suite /opt/shardproof ./
USER shardproof
CMD ["python", "-m", "shardproof.cluster.torchrun", "--help"]

FROM judge-runtime AS judge-all
LABEL shardproof.image=judge-all
COPY --from=all-packages /added /opt/venv
COPY --from=suite /opt/shardproof ./
USER shardproof
CMD ["shardproof", "--help"]
