-- ARGV: session TTL ms, fence, worker id, its record without the time; an empty record removes the worker. Most entries.
local refused = refusal(ARGV[2])
if refused then
  return refused
end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[5], ARGV[3])
else
  redis.call('HSET', KEYS[5], ARGV[3], ARGV[4] .. ' ' .. integer(now_ms()))
end
-- Restarted workers have new names: a session that lives for long would collect them.
while redis.call('HLEN', KEYS[5]) > tonumber(ARGV[5]) do
  local entries, oldest, oldest_ms = redis.call('HGETALL', KEYS[5]), nil, math.huge
  for i = 1, #entries, 2 do
    local used_ms = tonumber(string.match(entries[i + 1], '^%d+ %d+ %d+ %d+ (%d+)')) or 0
    if entries[i] ~= ARGV[3] and used_ms < oldest_ms then
      oldest, oldest_ms = entries[i], used_ms
    end
  end
  redis.call('HDEL', KEYS[5], oldest)
end
refresh(ARGV[1])
return {'OK'}
