-- ARGV: session TTL ms, fence, worker id, its record without the time; an empty record removes the worker.
local refused = refusal(ARGV[2])
if refused then
  return refused
end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[5], ARGV[3])
else
  redis.call('HSET', KEYS[5], ARGV[3], ARGV[4] .. ' ' .. integer(now_ms()))
end
refresh(ARGV[1])
return {'OK'}
