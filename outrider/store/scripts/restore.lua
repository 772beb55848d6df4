-- ARGV: session TTL ms, owner, fence, lease ms, token ids, classes, kinds (or empty), then field, value, ... of the state.
-- By the holder of a lease whose last changes, or whose whole session, a failover has lost.
local lease = redis.call('HMGET', KEYS[1], 'lease.fence', 'deleted')
if lease[2] then
  return {'NOT_FOUND'}
end
-- Numbers are times: whoever was given the session after the failover has a higher one.
if lease[1] and tonumber(lease[1]) > tonumber(ARGV[3]) then
  return {'FENCED', tonumber(lease[1])}
end
local unfit, length = write_log(0, ARGV[5], ARGV[6], ARGV[7])
if unfit then
  return unfit
end
redis.call('HSET', KEYS[1], unpack(ARGV, 8))
grant(ARGV[2], ARGV[3], ARGV[4])
refresh(ARGV[1])
return {'OK', length}
