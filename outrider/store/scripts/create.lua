-- ARGV: session TTL ms, owner, lease ms, token ids, classes, then field, value, ... of the state.
local lease = redis.call('HMGET', KEYS[1], 'lease.fence', 'lease.owner')
if lease[1] then
  -- An owner's name is never used twice: whoever finds its own here repeats a call whose reply was lost.
  local repeated = tonumber(lease[1]) == 1 and lease[2] == ARGV[2]
  if repeated and redis.call('GET', KEYS[2]) == ARGV[4] and redis.call('GET', KEYS[3]) == ARGV[5] then
    return grant(ARGV[2], 1, ARGV[3])
  end
  return {'EXISTS'}
end
-- The first write is one that a full server refuses: behind any other it would take all that follow.
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('HDEL', KEYS[1], 'deleted')
redis.call('SET', KEYS[2], ARGV[4])
redis.call('SET', KEYS[3], ARGV[5])
redis.call('DEL', KEYS[4], KEYS[5])
local reply = grant(ARGV[2], 1, ARGV[3])
refresh(ARGV[1])
return reply
