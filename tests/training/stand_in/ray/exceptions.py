"""The errors of Ray that ``training/on_ray.py`` knows."""


class RayError(Exception):
    pass


class RayTaskError(RayError):
    @property
    def cause(self) -> object:
        return self.args[0]


class GetTimeoutError(RayError):
    pass
