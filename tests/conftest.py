import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["treadle.testing", "tests.support"]

# A fixed seed: what fails in CI fails here too. TREADLE_HYPOTHESIS=wide looks further.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)
settings.register_profile("wide", settings.get_profile("steady"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("TREADLE_HYPOTHESIS", "steady"))
