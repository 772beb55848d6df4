"""`docker-compose.tls.yml` over `docker-compose.yml`, as processes: TLS on every edge, and keys.

With Debian's Redis, for the packaged Valkey speaks no TLS.
"""

from pathlib import Path

import pytest

from outrider.client import Client, client_tls
from outrider.errors import Unauthenticated, Unavailable
from outrider.keys import KeyLimits, make_key, write_record
from tests.authority import Authority
from tests.contract.servers import REDIS, program
from tests.deploy.files import project
from tests.deploy.load import request_of, text_of
from tests.deploy.plans import compose_plans
from tests.deploy.stage import Stage
from tests.deploy.test_compose import BOTH
from tests.e2e.toys import hear

pytestmark = [REDIS, pytest.mark.slow, pytest.mark.timeout(300)]


def write_files(stage: Stage) -> tuple[str, str]:
    """Write what TLS_DIR holds; return a key, and the CA that clients trust."""
    inside, outside = Authority(stage.folder / "inside"), Authority(stage.folder / "outside")
    (stage.folder / "ca.crt").write_bytes(inside.bundle)
    for name in ("store", "verifier", "draft", "orchestrator"):
        made = inside.issue(name, stage.hosts[name])
        (stage.folder / f"{name}.crt").write_bytes(Path(made.cert).read_bytes())
        (stage.folder / f"{name}.key").write_bytes(Path(made.key).read_bytes())
    front = outside.issue("front")
    (stage.folder / "front.crt").write_bytes(Path(front.cert).read_bytes())
    (stage.folder / "front.key").write_bytes(Path(front.key).read_bytes())
    key, record = make_key("somebody", KeyLimits(), 1.0)
    (stage.folder / "api-keys").write_bytes(write_record(record) + b"\n")
    return key, front.ca


async def test_with_the_tls_file_everything_is_healthy_and_only_a_key_opens_the_door(tmp_path: Path) -> None:
    """Health checks included: each service is asked over TLS, by what its own variables say."""
    variables = {"TARGET": "toy", "DRAFT_MODEL": "toy", "DRAFTER": "toy", "THREADS": "1"}
    plans = compose_plans(project(files=BOTH, **variables))
    async with Stage(plans, tmp_path, store_program=program("redis")) as stage:
        key, ca = write_files(stage)
        await stage.start("orchestrator")
        await stage.start("draft")
        (address,) = stage.addresses("orchestrator", 7400)
        request = request_of("the cat ", 40, 3)
        tls = client_tls(ca, server_name="front")
        async with Client([address], timeout_s=60, tls=tls, api_key=key) as client:
            heard = await hear(client, request)
        assert heard.token_ids == text_of("the cat ", 40, 3)
        assert heard.finished.figures.num_accepted > 0
        async with Client([address], timeout_s=10, tls=tls) as client:
            with pytest.raises(Unauthenticated):
                await hear(client, request)
        async with Client([address], timeout_s=5) as client:
            with pytest.raises(Unavailable):
                await hear(client, request)
        await stage.stop_all()
