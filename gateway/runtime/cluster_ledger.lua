-- The ledger of leases: one gateway's message in, what it is granted and what the others hold out. Atomic.
-- The protocol is described in gateway/core/lease.py; tests/property/lease_ledger.py is the same in Python.
--
-- KEYS  1 members: hash, gateway -> what is known of it     2 told: hash, gateway -> what it tells the others
--       3 epoch: hash {run, id, calm_ms, late_ms}           4 version of the shared keys
--       5 awaited: set of gateways that others knew before the memory was lost
-- ARGV  1 gateway  2 number  3 epoch of its claims  4 lease in ms  5 its claims as JSON, "" when it leaves
--       6 what it tells the others ("": as before)  7 a random id, for a new epoch
--       8 ms of calm after a restart of this server   9 ms of calm after its memory was lost
--       10 ms that a lease has to be seen over before it ends   11... the gateways that this one knows
-- A claim is [hold, used, need, peak, ask, slots, spare]; a standing is [held, used, need, peak, spare, granted].
-- What is in flight without being granted is held too, so that nobody else gets it, but is no part of the grant.
-- A member is {number, until_ms, over_ms: when its lease was first seen over, on: backend -> standing}.
if redis.replicate_commands then redis.replicate_commands() end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Another process, or an empty memory: what was granted is unknown, so for a while nothing more is.
local run, up_ms = 'unknown', 1e12
local asked, info = pcall(redis.call, 'INFO', 'server')
if asked and type(info) == 'string' then
  run = string.match(info, 'run_id:(%w+)') or run
  up_ms = (tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) or 1e9) * 1000
end
local epoch = redis.call('HMGET', KEYS[3], 'run', 'id', 'calm_ms', 'late_ms')
if epoch[1] ~= run then
  local calm = now + tonumber(ARGV[9])
  if epoch[1] then calm = now + tonumber(ARGV[8]) end
  if up_ms < tonumber(ARGV[8]) then calm = math.max(calm, now + tonumber(ARGV[8]) - up_ms) end
  local late = now + tonumber(ARGV[4])
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[5])
  redis.call('HSET', KEYS[3], 'run', run, 'id', ARGV[7], 'calm_ms', calm, 'late_ms', late)
  epoch = {run, ARGV[7], calm, late}
end

local members, flat = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local one = cjson.decode(flat[i + 1])
  if one.over_ms and now >= one.over_ms + tonumber(ARGV[10]) then
    redis.call('HDEL', KEYS[1], flat[i])
    redis.call('HDEL', KEYS[2], flat[i])
  else
    members[flat[i]] = one
    if one.until_ms < now and not one.over_ms then -- if this server stood still, its message is here already
      one.over_ms = now
      redis.call('HSET', KEYS[1], flat[i], cjson.encode(one))
    end
  end
end

local me, number = ARGV[1], tonumber(ARGV[2])
local known = members[me]
members[me] = nil
if known and number <= known.number then return {'stale'} end
if ARGV[5] == '' then
  redis.call('HDEL', KEYS[1], me)
  redis.call('HDEL', KEYS[2], me)
  return {'left'}
end

-- Calm ends once: after it slots were granted anew, and who comes then with claims of an older epoch comes too late.
local is_late, was_awaited = now >= tonumber(epoch[4]), false
local was_calm = now < tonumber(epoch[3]) or (not is_late and redis.call('SCARD', KEYS[5]) > 0)
if was_calm and not is_late then
  if ARGV[3] ~= epoch[2] then
    for i = 11, #ARGV do if not members[ARGV[i]] then redis.call('SADD', KEYS[5], ARGV[i]) end end
  end
  was_awaited = redis.call('SISMEMBER', KEYS[5], me) == 1
  if was_awaited then redis.call('SREM', KEYS[5], me) end
end
local is_calm = now < tonumber(epoch[3]) or (not is_late and redis.call('SCARD', KEYS[5]) > 0)

local held = {}
for _, other in pairs(members) do
  for backend, standing in pairs(other.on) do held[backend] = (held[backend] or 0) + standing[1] end
end
local on = {}
for backend, claim in pairs(cjson.decode(ARGV[5])) do
  local hold, used, ask, slots = claim[1], claim[2], claim[5], claim[6]
  local base = 0
  if known then
    local before = known.on[backend]
    base = math.min(ask, before and before[6] or 0) -- what it was granted is its own while it asks for it
  elseif (is_calm or was_awaited) and ARGV[3] ~= epoch[2] and ARGV[3] ~= '' then
    base = hold -- by a ledger that is no more; nothing was granted since
  end
  local granted = base
  if not is_calm then
    granted = math.max(base, math.min(ask, slots - (held[backend] or 0)))
  end
  on[backend] = {math.max(granted, used), used, claim[3], claim[4], claim[7], granted}
end
redis.call('HSET', KEYS[1], me, cjson.encode({number = number, until_ms = now + tonumber(ARGV[4]), on = on}))
if ARGV[6] ~= '' then redis.call('HSET', KEYS[2], me, ARGV[6]) end

local others = {}
for name, other in pairs(members) do others[name] = other.on end
return {'granted', epoch[2], now, cjson.encode(on), cjson.encode(others),
  redis.call('HGETALL', KEYS[2]), redis.call('GET', KEYS[4]) or '0'}
