# Two images from one source: `web` (web and controller, no torch) and `worker` (a GPU host, no Django).
# docs/howto/deploy.md shows how to pin the base image by its digest.
FROM python:3.11.14-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
# join-token writes the join token to the second folder, and host workers read it there.
RUN useradd --create-home meshboard && install -d -o meshboard /var/lib/meshboard && \
    install -d -m 700 -o meshboard /var/lib/meshboard-join
COPY pyproject.toml requirements.lock ./

FROM base AS web
# ssh reaches the Slurm commands, which this image does not contain.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-client && rm -rf /var/lib/apt/lists/*
# The packages are a layer below the source, so a changed line does not install them again.
COPY deploy/list_requirements.py ./
RUN python list_requirements.py web > /tmp/web.txt && pip install -c requirements.lock -r /tmp/web.txt
COPY setup.py VERSION README.md LICENSE manage.py ./
COPY contracts contracts
COPY planner planner
COPY webapp webapp
COPY jobs jobs
COPY templates templates
COPY client client
COPY manual manual
COPY docs docs
# Sources that were cloned under umask 077 are readable, and processes start from compiled files.
RUN chmod -R a+rX /app && pip install --no-deps -c requirements.lock --editable . && rm -rf ./*.egg-info && python -m compileall -q .
# Static files stay in the image. A volume would keep the files of an older image.
ENV MESHBOARD_STATIC_ROOT=/srv/static
RUN MESHBOARD_SECRET_KEY=only-for-this-step-0123456789-0123456789-0123456789 MESHBOARD_REDIS_URL=redis://127.0.0.1 \
    python manage.py collectstatic --no-input --verbosity 0
# The web process serves the documentation at /docs. The build tools stay in the build stage.
RUN pip install -c requirements.lock --target /tmp/build httpx mkdocs pyyaml typer && \
    PYTHONPATH=/tmp/build python -m manual && \
    rm -rf /tmp/build
USER meshboard

FROM base AS worker
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap libjemalloc2 && rm -rf /var/lib/apt/lists/*
COPY deploy/list_requirements.py ./
RUN python list_requirements.py worker > /tmp/worker.txt && pip install -c requirements.lock -r /tmp/worker.txt
COPY setup.py VERSION README.md LICENSE ./
COPY contracts contracts
COPY planner planner
COPY workers workers
RUN chmod -R a+rX /app && pip install --no-deps -c requirements.lock --editable . && rm -rf ./*.egg-info && python -m compileall -q .
# The worker runs as root, because only root can start the jobs of each owner as a separate user.
