from tests.e2e.conftest import ddp_run, own_project, project  # noqa: F401 - fixtures
