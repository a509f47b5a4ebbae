"""Commands and plans, what the server can do, and what its errors mean."""

from treadle.model.bson_types import Filter as Filter
from treadle.model.bson_types import Raw as Raw
from treadle.model.bson_types import Update as Update
from treadle.plan.commands import (
    Aside as Aside,
)
from treadle.plan.commands import (
    Call as Call,
)
from treadle.plan.commands import (
    Command as Command,
)
from treadle.plan.commands import (
    DatabaseCommand as DatabaseCommand,
)
from treadle.plan.commands import (
    Plan as Plan,
)
from treadle.plan.commands import (
    Read as Read,
)
from treadle.plan.commands import (
    Transact as Transact,
)
from treadle.plan.commands import (
    Wait as Wait,
)
from treadle.plan.commands import (
    aggregate as aggregate,
)
from treadle.plan.commands import (
    aside as aside,
)
from treadle.plan.commands import (
    bulk_write as bulk_write,
)
from treadle.plan.commands import (
    by_id as by_id,
)
from treadle.plan.commands import (
    count_documents as count_documents,
)
from treadle.plan.commands import (
    database_command as database_command,
)
from treadle.plan.commands import (
    delete_many as delete_many,
)
from treadle.plan.commands import (
    delete_one as delete_one,
)
from treadle.plan.commands import (
    find as find,
)
from treadle.plan.commands import (
    find_one as find_one,
)
from treadle.plan.commands import (
    find_one_and_delete as find_one_and_delete,
)
from treadle.plan.commands import (
    find_one_and_update as find_one_and_update,
)
from treadle.plan.commands import (
    insert_many as insert_many,
)
from treadle.plan.commands import (
    insert_one as insert_one,
)
from treadle.plan.commands import (
    must_propagate as must_propagate,
)
from treadle.plan.commands import (
    replace_one as replace_one,
)
from treadle.plan.commands import (
    require_fresh as require_fresh,
)
from treadle.plan.commands import (
    transact as transact,
)
from treadle.plan.commands import (
    unwind as unwind,
)
from treadle.plan.commands import (
    update_many as update_many,
)
from treadle.plan.commands import (
    update_one as update_one,
)
from treadle.plan.commands import (
    wait as wait,
)
