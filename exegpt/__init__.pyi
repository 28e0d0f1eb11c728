from exegpt.app.library import plan as plan
from exegpt.app.library import simulate as simulate
from exegpt.app.library import tune as tune
from exegpt.workload import Workload as Workload

__version__: str
