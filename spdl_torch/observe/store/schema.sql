-- Tables hold the measurements, each row once. The views task_stats, queue_stats and event_stats show
-- the intervals of loaders and pipelines like the windows of hooks, and begin with the columns that SPDL's example logger
-- gives its tables, so that queries written for those run here. Of an interval that is damaged they
-- show nothing.

CREATE TABLE run (
    run_id INTEGER PRIMARY KEY,
    started REAL NOT NULL,       -- seconds since 1970
    ended REAL,                  -- NULL: it runs still, or was killed
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    versions TEXT NOT NULL,      -- JSON: package -> version
    config TEXT NOT NULL         -- JSON: what the user gave
);
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run,
    timestamp REAL NOT NULL,
    event_name TEXT NOT NULL,
    details TEXT NOT NULL        -- JSON
);
CREATE TABLE interval (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run,
    timestamp REAL NOT NULL,     -- end of the interval
    pipeline INTEGER NOT NULL,   -- the number of the loader or pipeline in its run
    name TEXT NOT NULL,          -- train; "" = none
    begins INTEGER NOT NULL,     -- 1: it is the first of its pass
    totals TEXT NOT NULL,        -- JSON: what adds up
    details TEXT NOT NULL        -- JSON: probes of the pass so far, and the rows of the views
);
CREATE TABLE task_window (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run,
    name TEXT NOT NULL,          -- as logged: 0:1:decode[10]
    pipeline INTEGER,            -- the parts of that name, NULL where it has no such form
    stage_number INTEGER,
    label TEXT NOT NULL,         -- decode: the same when the concurrency changes
    concurrency INTEGER NOT NULL,
    timestamp REAL NOT NULL,     -- end of the window
    num_tasks INTEGER NOT NULL,
    num_failures INTEGER NOT NULL,
    ave_time REAL NOT NULL,
    p90_time REAL NOT NULL,
    p99_time REAL NOT NULL,
    elapsed REAL NOT NULL,
    ave_cpu_time REAL NOT NULL,
    p50_time REAL NOT NULL,
    busy_time REAL NOT NULL,
    num_dropped INTEGER          -- NULL: nobody counted
);
CREATE TABLE queue_window (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run,
    name TEXT NOT NULL,          -- as logged: 0:1:decode[10]_queue
    pipeline INTEGER,            -- the parts of that name, NULL where it has no such form
    stage_number INTEGER,
    label TEXT NOT NULL,         -- decode: the same when the concurrency changes
    concurrency INTEGER NOT NULL,
    timestamp REAL NOT NULL,     -- end of the window
    elapsed REAL NOT NULL,
    num_items INTEGER NOT NULL,
    ave_put_time REAL NOT NULL,
    ave_get_time REAL NOT NULL,
    p90_put_time REAL NOT NULL,
    p99_put_time REAL NOT NULL,
    p90_get_time REAL NOT NULL,
    p99_get_time REAL NOT NULL,
    occupancy_rate REAL NOT NULL,
    put_wait_time REAL NOT NULL,
    get_wait_time REAL NOT NULL
);
CREATE INDEX interval_time ON interval (timestamp);
CREATE INDEX event_time ON event (timestamp);
CREATE INDEX task_window_time ON task_window (timestamp);
CREATE INDEX queue_window_time ON queue_window (timestamp);
CREATE VIEW event_stats AS
    SELECT e.id, e.timestamp, e.event_name, e.details, r.run_id, r.rank, r.host
    FROM event e JOIN run r USING (run_id);
CREATE VIEW task_stats AS
    SELECT w.id, w.timestamp, w.name, w.num_tasks, w.num_failures, w.ave_time, w.p90_time,
           w.p99_time, w.elapsed, w.ave_cpu_time, w.p50_time, w.busy_time, w.label, w.stage_number,
           w.concurrency, r.run_id, r.rank, r.host, w.pipeline, w.num_dropped
    FROM task_window w JOIN run r USING (run_id)
    UNION ALL
    SELECT i.id * 1000 + j.key, i.timestamp, json_extract(j.value, '$.name'),
           json_extract(j.value, '$.num_tasks'), json_extract(j.value, '$.num_failures'),
           json_extract(j.value, '$.ave_time'), json_extract(j.value, '$.p90_time'),
           json_extract(j.value, '$.p99_time'), json_extract(j.value, '$.elapsed'),
           json_extract(j.value, '$.ave_cpu_time'), json_extract(j.value, '$.p50_time'),
           json_extract(j.value, '$.busy_time'), json_extract(j.value, '$.label'),
           json_extract(j.value, '$.stage_number'), json_extract(j.value, '$.concurrency'),
           r.run_id, r.rank, r.host, i.pipeline, json_extract(j.value, '$.num_dropped')
    FROM interval i JOIN run r USING (run_id) JOIN
         json_each(CASE WHEN json_valid(i.details) THEN i.details END, '$.tasks') j;
CREATE VIEW queue_stats AS
    SELECT w.id, w.timestamp, w.name, w.elapsed, w.num_items, w.ave_put_time, w.ave_get_time,
           w.p90_put_time, w.p99_put_time, w.p90_get_time, w.p99_get_time, w.occupancy_rate,
           w.put_wait_time, w.get_wait_time, w.label, w.stage_number, w.concurrency,
           r.run_id, r.rank, r.host, w.pipeline
    FROM queue_window w JOIN run r USING (run_id)
    UNION ALL
    SELECT i.id * 1000 + j.key, i.timestamp, json_extract(j.value, '$.name'),
           json_extract(j.value, '$.elapsed'), json_extract(j.value, '$.num_items'),
           json_extract(j.value, '$.ave_put_time'), json_extract(j.value, '$.ave_get_time'),
           json_extract(j.value, '$.p90_put_time'), json_extract(j.value, '$.p99_put_time'),
           json_extract(j.value, '$.p90_get_time'), json_extract(j.value, '$.p99_get_time'),
           json_extract(j.value, '$.occupancy_rate'), json_extract(j.value, '$.put_wait_time'),
           json_extract(j.value, '$.get_wait_time'), json_extract(j.value, '$.label'),
           json_extract(j.value, '$.stage_number'), json_extract(j.value, '$.concurrency'),
           r.run_id, r.rank, r.host, i.pipeline
    FROM interval i JOIN run r USING (run_id) JOIN
         json_each(CASE WHEN json_valid(i.details) THEN i.details END, '$.queues') j;
